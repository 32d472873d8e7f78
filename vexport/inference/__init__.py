"""Ask a model: prompts go in, text and log-probabilities come out.

vLLM calls an engine in a process of ours "offline inference" and a server "online serving". This
package does both, and returns the same answers for both, so that one side of a comparison may be an
engine and the other a server. What is computed from the answers is in `vexport.evaluation`; the
process that runs vLLM is in `vexport.engine`.

In the process of the command:

- `asking.py`: the sources of answers behind one interface, `AnswerSource.ask`: an engine of vLLM
  (`EngineSource`), a server (`EndpointSource`), and results that exist already (`GivenResults`).
- `answers.py`: what a source returns.
- `prompts.py`, `text_rows.py`, `prompting.py`, `tasks.py`, `asked_tasks.py`: what a model is asked:
  fixed prompts, rows of a text, and tasks of lm-eval with their settings.
- `task_data.py`: lm-eval's tasks as data, and a worker that downloads their documents.
- `engine_session.py`: starts the worker that asks an engine.
- `result_files.py`: finds results that are given in place of a model.
- `session_folder.py`, `fingerprint.py`, `repeated.py`, `added_keys.py`: the files of a session.
- `options.py`: how engines are started.

In worker processes, which import vLLM and lm-eval:

- `model.py`: the interface of a model there: `Model`. `engine_model.py` has it for an engine,
  `endpoint/model.py` for a server.
- `lm_eval_runner.py` runs lm-eval's tasks on a `Model`, through lm-eval's own class for vLLM
  (`lm_eval_model.py`). `text_scores.py` and `drafts.py` ask a `Model` the rest.
- `kept_answers.py`: answers on disk, so that a killed session asks only the rest.
- `engine_worker.py` and `endpoint/worker.py`: the programs that are started.

`endpoint/` has the client of a server: HTTP (`client.py`), the meaning of replies (`replies.py`),
retries and refusals (`server.py`), and the tokenizer for its prompts (`tokenizer.py`).
"""
