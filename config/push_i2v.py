# Real-physics robot video: 120 demos of robosuite with five instructions, two views at 32 x 32, 41 frames at 20 Hz.
# Two experts of 7 M parameters from random weights, full fine-tuning, for one GPU.
model = "out/tiny/robot_i2v"  # python tiny.py --robot=robot_push.hdf5 --robot_box=-0.6,-0.6,0.7,0.6,0.6,1.3
data = "robot_push.hdf5"
cache_dir = "out/cache_push"
out_dir = "out/push_i2v"
cell_height = 32
cell_width = 32
num_frames = 41  # long enough that the cube moves in every clip
window_stride = 4
pad_short = True  # the shortest demos have 33 frames
workspace_box = "-0.6,-0.6,0.7,0.6,0.6,1.3"

batch_size = 16
max_steps = 3200
lr = 2e-3
warmup_steps = 100
ema_decay = 0.998
eval_interval = 1600
num_val_windows = 20
num_val_videos = 20  # one clip of each held-out demo
num_inference_steps = 20
fps = 20
dtype = "float32"  # so small a model waits for kernels to start: bfloat16 was slower on an H200
log_interval = 100
save_interval = 0
