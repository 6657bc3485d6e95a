# Over config/push_i2v.py: a row of pointmaps under the RGB row.
out_dir = "out/push_i2v_hcpt"
pointmaps = True
