# Four steps of the robot recipe with pointmaps at full size, one clip a step, then a validation video of 50 steps:
# does it fit, how long does a step take? One H200: below 130 GiB. Needs no second GPU.
base = "robocasa_i2v.py, smoke.py"
out_dir = "out/robocasa_i2v_smoke_hcpt"
lora_rank = 16
beta2 = 0.99
keep_in_memory = True
