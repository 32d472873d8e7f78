"""Run vLLM in worker processes, and judge what it loads.

`session.py` and `process.py` start a worker and name the cause if it fails. `worker.py` starts the
engine there, and `describe.py` describes it. `dry/` loads checkpoints without weights or GPU, and
`gate.py` uses this after `quantize`. `reference.py` and `agreement.py` compare vLLM with
transformers. `vexport.inference` asks the engine.
"""
