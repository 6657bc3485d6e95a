# Flow-GRPO in the tiny world: the fine-tuned TI2V model of config/tiny_ti2v_sft.py learns to do what prompts say.
# These are train_grpo.py's own defaults; the file exists to be copied.
model = "out/tiny_ti2v/model"
data_jsonl = "out/tiny/train.jsonl"
eval_data_jsonl = "out/tiny/eval.jsonl"
out_dir = "out/tiny_grpo"
