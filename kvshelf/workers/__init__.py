"""The room of the models: engine, policies and budgets; and the processes that run them.

`engine` and `policies` are plain Python on torch and transformers and work without Ray.
"""
