# Four steps of the robot recipe with pointmaps at full size, one clip a step, then a validation video of 50 steps:
# does it fit, how long does a step take? One H200: below 130 GiB. Needs no second GPU.
model = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
data = "demo.hdf5"
cache_dir = "out/cache_robocasa"
out_dir = "out/robocasa_i2v_smoke_hcpt"
views = "robot0_agentview_left,robot0_agentview_right"
pointmaps = True
cell_height = 432
cell_width = 384
num_frames = 81
window_stride = 20
max_text_tokens = 512
encode_batch = 1
cache_dtype = "bfloat16"

lora_rank = 16
batch_size = 1
max_steps = 4
lr = 1e-4
warmup_steps = 0
seed = 1  # draws both experts within four steps

eval_interval = 0
num_val_windows = 1
val_sigmas = 1
num_val_videos = 1
num_inference_steps = 50
guidance_scale = 3.5
guidance_scale_2 = 3.5
fps = 20

dtype = "bfloat16"
checkpointing = "selective"
compile_blocks = True
save_interval = 2
log_interval = 1
