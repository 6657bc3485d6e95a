# Two iterations of config/wan22_ti2v_grpo.py with an evaluation of four videos: does it fit, how long does it take?
base = "wan22_ti2v_grpo.py, smoke_grpo.py"
out_dir = "out/wan22_ti2v_grpo_smoke"
