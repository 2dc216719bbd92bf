"""How the embedded demo model is made: tasks, tokenizer, training, judging. ``scripts/train_demo.py`` runs it all."""
