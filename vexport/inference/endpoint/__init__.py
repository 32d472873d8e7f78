"""A model behind the address of a server with the OpenAI API.

`client.py` sends HTTP requests within limits of time and size. `replies.py` parses the replies.
`server.py` retries requests and raises errors for refused requests. `model.py` uses these modules
to run the prompts of an evaluation, and `worker.py` is the worker's program. `tokenizer.py` chooses
the tokenizer for the prompts.
"""
