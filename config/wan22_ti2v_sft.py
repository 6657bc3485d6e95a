# Wan2.2-TI2V-5B on the robot views, RGB, LoRA rank 64: one transformer, the first latent frame given clean.
# Cells are multiples of 32 (VAE stride 16, patches of 2): 448 x 384, 21 x 28 x 48 latents, 7,056 tokens a clip.
model = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
data = "demo.hdf5"
cache_dir = "out/cache_robocasa_ti2v"
out_dir = "out/robocasa_ti2v"
views = "robot0_agentview_left,robot0_agentview_right"
cell_height = 448
cell_width = 384
num_frames = 81
window_stride = 20
max_text_tokens = 512
encode_batch = 1
cache_dtype = "bfloat16"
keep_in_memory = False

shift = 5.0
lora_rank = 64
lora_targets = "to_q,to_k,to_v,to_out.0,ffn.net.0.proj,ffn.net.2"
batch_size = 2
max_steps = 3000
lr = 1e-4
min_lr = 1e-5
warmup_steps = 50
beta2 = 0.999

eval_interval = 500
num_val_windows = 8
num_val_videos = 4
num_inference_steps = 50
guidance_scale = 5.0
guidance_scale_2 = 5.0
fps = 20

dtype = "bfloat16"
checkpointing = "selective"
compile_blocks = True
save_interval = 250
log_interval = 1
