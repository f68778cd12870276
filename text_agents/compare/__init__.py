"""What training changed in a language model: its weights, and what it could do before."""
