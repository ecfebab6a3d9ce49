"""The APIs of OpenAI and Anthropic: their requests as questions, answers in their form."""
