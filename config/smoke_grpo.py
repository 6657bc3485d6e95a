# Over a Flow-GRPO recipe, `train_grpo.py config/wan22_ti2v_grpo.py config/smoke_grpo.py`: two of its iterations, then
# an evaluation of four videos: does it fit, how long does it take?
out_dir = "out/smoke_grpo"
max_iterations = 2
ema_interval = 1  # two iterations: else the evaluation would be of the base model
eval_interval = 2
num_eval_samples = 4
num_eval_videos = 2
num_eval_steps = 20
save_interval = 1
