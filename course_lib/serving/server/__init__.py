"""`python -m course_lib serve`: the engine behind OpenAI's interface for chats."""
