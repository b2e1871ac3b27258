"""Private parts of torch and Lightning, each with its reason and the condition on which it goes."""
