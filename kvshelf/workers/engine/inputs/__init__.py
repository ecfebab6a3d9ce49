"""What the engine is given, checked and ready for the model: documents, questions, policies, budgets."""
