# Flow-GRPO by a real SGLang server on a CPU, after `python tiny.py` and `make sglang`: three iterations in about
# a minute and a half. Model and VAE are random, so that videos are noise and nothing is learnt: it shows the machinery.
model = "out/tiny/ti2v_conv"
out_dir = "out/tiny_grpo_sglang"
height = 64
width = 96
num_frames = 9
max_text_tokens = 512
negative_prompt = "dark"
rewards = "smoothness:1.0"
eval_rewards = ""

rollout = "sglang"
sglang_launch = True

prompts_per_iteration = 2
group_size = 4
rollout_batch = 4
num_steps = 5
guidance_scale = 3.0
lr = 1e-2
max_iterations = 3
num_eval_samples = 2
num_eval_videos = 1
num_eval_steps = 5
eval_interval = 0
save_interval = 0
