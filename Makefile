.PHONY: tiny test lint sglang serve

PYTHON = .venv/bin/python
PORT = 30000

# The whole story in the tiny world: two-expert image-to-video fine-tuning, then a TI2V base model and Flow-GRPO on it.
tiny: .venv/installed
	$(PYTHON) tiny.py
	$(PYTHON) prepare_robocasa.py config/tiny_i2v.py
	$(PYTHON) train_i2v_sft.py config/tiny_i2v.py
	$(PYTHON) prepare_robocasa.py config/tiny_ti2v_sft.py
	$(PYTHON) train_i2v_sft.py config/tiny_ti2v_sft.py
	$(PYTHON) train_grpo.py config/tiny_grpo.py

test: .venv/installed
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q tests

# SGLang's diffusion server in an environment of its own, which pins another torch: about 5 minutes and 11 GB.
sglang: .venv-sglang/installed

serve: .venv/installed .venv-sglang/installed
	$(PYTHON) sglang_server.py --model=$(MODEL) --port=$(PORT)

lint: .venv/installed
	$(PYTHON) -m ruff check .

.venv/installed: requirements.txt
	python3 -m venv .venv
	$(PYTHON) -m pip install -r requirements.txt
	touch $@

.venv-sglang/installed: requirements-sglang.txt
	python3 -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --upgrade pip  # older ones take very long to resolve
	.venv-sglang/bin/python -m pip install -r requirements-sglang.txt
	touch $@
