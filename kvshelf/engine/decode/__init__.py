"""Answers: many questions, one forward pass per step."""
