"""Commands that remove: everything of a subject, or what is left on a machine."""
