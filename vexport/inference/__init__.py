"""Run a model: the input is prompts, the output is text and log-probabilities.

In vLLM's terms, an engine in a process of vexport is "offline inference", and a server is "online
serving". This package supports both, and returns the same types for both. Therefore an engine can
be compared with a server. `vexport.judge` computes results from the responses, and
`vexport.engine` contains the process that runs vLLM.

In the process of the command:

- `response_sources.py`: the sources of responses behind one interface,
  `ResponseSource.get_responses`: an engine of vLLM (`EngineSource`) and a server
  (`EndpointSource`).
- `answers.py`: the types of responses that a source returns.
- `prompts.py`, `text_rows.py`, `prompting.py`, `tasks.py`, `requested_tasks.py`: the prompts of a
  model: fixed prompts, rows of a text, and tasks of lm-eval with their settings.
- `questions.py`: digests of tasks' questions, to detect questions that changed.
- `task_data.py`: lm-eval's tasks as data, and a worker that downloads their documents.
- `shipped/`: tasks whose documents vexport makes, such as calls of tools.
- `engine_session.py`: starts the worker process that runs an engine.
- `result_files.py`: finds results that the user gives instead of a model.
- `session_folder.py`, `fingerprint.py`, `repeated.py`, `added_keys.py`: the files of a session.
- `options.py`: options for starting engines.

In worker processes, which import vLLM and lm-eval:

- `model.py`: the interface of a model in a worker, `Model`. `engine_model.py` implements it for an
  engine, `endpoint/model.py` for a server.
- `lm_eval_runner.py` runs lm-eval's tasks on a `Model`, through lm-eval's class for vLLM
  (`lm_eval_model.py`). `silent_model.py` is a `Model` that only builds prompts.
- `text_scores.py` writes the log-probabilities of a text (`row_scores.py`), and `drafts.py` counts
  the accepted drafts of speculative decoding.
- `stored_responses.py`: responses on disk, so that a killed session resumes with the remaining
  prompts.
- `engine_worker.py` and `endpoint/worker.py`: the programs of the worker processes.

`endpoint/` contains the client of a server: HTTP (`client.py`), the parser of replies
(`replies.py`), retries and errors (`server.py`), and the choice of a tokenizer for the prompts
(`tokenizer.py`).
"""
