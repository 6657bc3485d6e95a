# Flow-GRPO of a tiny two-expert I2V model, the one that config/tiny_i2v_mixed.py leaves. The window of stochastic steps
# may span the boundary (steps 0 to 3 are the high-noise expert's at shift 5 and 10 steps, 4 to 9 the low-noise one's):
# both experts are trained.
model = "out/tiny_i2v_mixed/model"
data_jsonl = "out/tiny/train.jsonl"
eval_data_jsonl = "out/tiny/eval.jsonl"
out_dir = "out/tiny_grpo_i2v"
sde_window = (0, 6)
guidance_scale_2 = 1.0
