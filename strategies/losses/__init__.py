"""How the loss gets from hidden states to a number: one file per family. They import torch; loss.py imports them late."""
