"""``python -m dilated_attention_pytorch``: the command ``dilated-attention``."""

from .cli import main

if __name__ == "__main__":
    main()
