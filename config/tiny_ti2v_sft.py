# The tiny TI2V model, one view: the base model of config/tiny_grpo.py. Half of its demonstrations ignore their prompt
# (robot_mixed.hdf5), so it follows prompts only now and then: reinforcement learning has something to do.
model = "out/tiny/ti2v"
data = "out/tiny/robot_mixed.hdf5"
cache_dir = "out/tiny/cache_ti2v"
out_dir = "out/tiny_ti2v"
views = "robot0_agentview_left"
max_steps = 800
eval_interval = 400
num_inference_steps = 20
