"""Published models: their weights, their tokens and the form of a conversation, from files that others wrote.

from course_lib.models.loading.pretrained import load

model, tokenizer = load("SmolLM2-135M-Instruct")      # fetched at the first use, 93 MB
model, tokenizer = load("folder")                     # config.json, *.safetensors, tokenizer.json
model, tokenizer = load("file.gguf")
model, tokenizer = load("Qwen/Qwen3-0.6B")            # from the Hugging Face hub
"""
