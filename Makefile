.PHONY: tiny test lint

PYTHON = .venv/bin/python

# Builds the tiny world and fine-tunes a two-expert image-to-video model on it.
tiny: .venv/installed
	$(PYTHON) tiny.py
	$(PYTHON) prepare_robocasa.py config/tiny_i2v.py
	$(PYTHON) train_i2v_sft.py config/tiny_i2v.py

test: .venv/installed
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q tests

lint: .venv/installed
	$(PYTHON) -m ruff check .

.venv/installed: requirements.txt
	python3 -m venv .venv
	$(PYTHON) -m pip install -r requirements.txt
	touch $@
