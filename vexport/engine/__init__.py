"""Run vLLM in worker processes, and judge the results.

`session.py` and `process.py` start a worker and find the cause if it fails. `worker.py` starts the
engine in the worker, and `describe.py` describes it. `dry/` loads checkpoints without weights or
GPU. `loader_check.py` uses the dry load for `check`, and after `quantize`. `reference.py` and
`agreement.py` compare vLLM with transformers. `vexport.inference` sends prompts to the engine.
"""
