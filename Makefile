.PHONY: tiny test lint

PYTHON = .venv/bin/python

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

lint: .venv/installed
	$(PYTHON) -m ruff check .

.venv/installed: requirements.txt
	python3 -m venv .venv
	$(PYTHON) -m pip install -r requirements.txt
	touch $@
