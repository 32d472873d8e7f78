"""A model behind the address of a server with the OpenAI API.

`client.py` sends HTTP requests within limits of time and size, `replies.py` reads what is sent
back, `server.py` tries again and reports refusals. On top of these, `model.py` asks the questions
of an evaluation, and `worker.py` is the program that does so. `tokenizer.py` chooses the tokenizer
that makes the prompts.
"""
