# Flow-GRPO of Wan2.2-I2V-A14B, both experts: 480 x 480, 5 frames, 8 steps of which step 1 is stochastic and trained,
# 48 prompts x 16 videos an iteration. At shift 5 step 1 belongs to the high-noise expert: it is the one that learns.
# Two GPUs or more: 107 GiB a GPU by the printed estimate on two, and one has no room for both experts and the rest.
model = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
data_jsonl = "train.jsonl"
eval_data_jsonl = "val.jsonl"
out_dir = "out/wan22_i2v_grpo"
height = 480
width = 480
num_frames = 5
max_text_tokens = 512
negative_prompt = "blurry, low quality, distorted, static"

rewards = "pickscore:1.0"
eval_rewards = "smoothness:1.0,first_frame:1.0"

prompts_per_iteration = 48
group_size = 16
rollout_batch = 16
decode_batch = 4
num_steps = 8
shift = 5.0
noise_level = 0.9
num_sde_steps = 1
sde_window = (1, 2)
guidance_scale = 3.5
guidance_scale_2 = 3.5

lora_rank = 64
lora_alpha = 128.0
max_iterations = 200
num_minibatches = 2
lr = 1e-4
clip_range = 1e-4
recompute_log_prob = True
ema_decay = 0.9
ema_interval = 4

eval_interval = 10
num_eval_samples = 32
num_eval_videos = 4
num_eval_steps = 40
fps = 16

dtype = "bfloat16"
vae_dtype = "bfloat16"
checkpointing = "selective"
compile_blocks = True
save_interval = 10
