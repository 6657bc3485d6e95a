# Two iterations of config/wan22_ti2v_grpo.py with an evaluation of four videos: does it fit, how long does it take?
model = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
data_jsonl = "train.jsonl"
eval_data_jsonl = "val.jsonl"
out_dir = "out/wan22_ti2v_grpo_smoke"
height = 480
width = 832
num_frames = 49
max_text_tokens = 512
negative_prompt = "blurry, low quality, distorted, static"

rewards = "pickscore:1.0"
eval_rewards = "smoothness:1.0,first_frame:1.0"

prompts_per_iteration = 2
group_size = 8
rollout_batch = 2
decode_batch = 1
num_steps = 20
shift = 5.0
noise_level = 0.7
num_sde_steps = 2
sde_window = (1, 20)
guidance_scale = 5.0

lora_rank = 64
lora_alpha = 128.0
max_iterations = 2
lr = 1e-4
clip_range = 1e-4
recompute_log_prob = True
ema_decay = 0.9
ema_interval = 1  # two iterations: else the evaluation would be of the base model

eval_interval = 2
num_eval_samples = 4
num_eval_videos = 2
num_eval_steps = 20
fps = 24

dtype = "bfloat16"
vae_dtype = "bfloat16"
checkpointing = "selective"
compile_blocks = True
save_interval = 1
