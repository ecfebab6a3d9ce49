"""Inputs of the engine, checked and made ready for the model: documents, questions, policies, budgets."""
