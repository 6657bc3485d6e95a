# The tiny two-expert I2V model, one view, on demonstrations of which half ignore their prompt: the base model of
# config/tiny_grpo_i2v.py.
model = "out/tiny/i2v"
data = "out/tiny/robot_mixed.hdf5"
cache_dir = "out/tiny/cache_i2v_mixed"
out_dir = "out/tiny_i2v_mixed"
views = "robot0_agentview_left"
max_steps = 1000
eval_interval = 500
num_inference_steps = 20
