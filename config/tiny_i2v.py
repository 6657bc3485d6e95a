# The tiny world on a laptop's CPU: two experts of 1 M parameters, full fine-tuning from random weights, RGB.
# These are the scripts' own defaults; the file exists to be copied.
model = "out/tiny/i2v"
data = "out/tiny/robot.hdf5"
cache_dir = "out/tiny/cache_i2v"
out_dir = "out/tiny_i2v"
