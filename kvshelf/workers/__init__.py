"""Everything that runs models: engine, policies and budgets, and the processes around them.

`engine` and `policies` are plain Python on torch and transformers and work without Ray.
"""
