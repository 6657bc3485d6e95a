# Four steps of the robot recipe at full size, RGB alone, one clip a step, then a validation video of 50 steps:
# does it fit, how long does a step take? One H200: below 100 GiB. Needs no second GPU.
base = "robocasa_i2v_smoke_hcpt.py"
out_dir = "out/robocasa_i2v_smoke_rgb"
pointmaps = False
