# Over a fine-tuning recipe, `train_i2v_sft.py config/robocasa_i2v.py config/smoke.py`: four of its steps, then a
# validation video: does it fit, how long does a step take?
out_dir = "out/smoke"
max_steps = 4
warmup_steps = 0
seed = 1  # draws both experts within four steps
eval_interval = 0
num_val_windows = 1
val_sigmas = 1
num_val_videos = 1
save_interval = 2
log_interval = 1
