# The tiny world with an XYZ pointmap row under the RGB row (HCPT): twice the tokens.
model = "out/tiny/i2v"
data = "out/tiny/robot.hdf5"
cache_dir = "out/tiny/cache_i2v"  # shares the RGB latents and the text with tiny_i2v.py
out_dir = "out/tiny_i2v_hcpt"
pointmaps = True
batch_size = 32
