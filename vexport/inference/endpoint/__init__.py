"""A model behind the address of a server with the OpenAI API."""
