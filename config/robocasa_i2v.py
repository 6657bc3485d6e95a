# The robot recipe: Wan2.2-I2V-A14B on RoboCasa, two views, RGB over pointmaps (HCPT), LoRA rank 64 on both experts.
# 54,432 tokens a clip; 72 GiB of activations on each GPU, and 57 GB of weights shared by the GPUs of a copy.
model = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
data = "demo.hdf5"  # RoboCasa HDF5 with <view>_depth, _intrinsics and _extrinsics
cache_dir = "out/cache_robocasa"
out_dir = "out/robocasa_i2v"
views = "robot0_agentview_left,robot0_agentview_right"
pointmaps = True
cell_height = 432
cell_width = 384
num_frames = 81
window_stride = 20
max_text_tokens = 512
negative_prompt = ""
encode_batch = 1
cache_dtype = "bfloat16"
keep_in_memory = False

shift = 5.0
text_dropout = 0.1
lora_rank = 64
batch_size = 1
grad_accum = 1
max_steps = 3000
lr = 1e-4
min_lr = 1e-5
warmup_steps = 50
beta2 = 0.999

eval_interval = 500
num_val_windows = 8
num_val_videos = 4
num_inference_steps = 50
guidance_scale = 3.5
guidance_scale_2 = 3.5
fps = 20

dtype = "bfloat16"
checkpointing = "selective"
compile_blocks = True
save_interval = 250
log_interval = 1
