# Flow-GRPO of Wan2.2-I2V-A14B, both experts: 480 x 480, 5 frames, 8 steps of which step 1 is stochastic and trained,
# 48 prompts x 16 videos an iteration. At shift 5 step 1 belongs to the high-noise expert: it is the one that learns.
# Two GPUs or more: 107 GiB a GPU by the printed estimate on two, and one has no room for both experts and the rest.
base = "wan22_ti2v_grpo.py"
model = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
out_dir = "out/wan22_i2v_grpo"
width = 480
num_frames = 5

prompts_per_iteration = 48
group_size = 16
rollout_batch = 16
decode_batch = 4
num_steps = 8
noise_level = 0.9
num_sde_steps = 1
sde_window = (1, 2)
guidance_scale = 3.5
guidance_scale_2 = 3.5
num_minibatches = 2

eval_interval = 10
num_eval_samples = 32
num_eval_steps = 40
fps = 16
