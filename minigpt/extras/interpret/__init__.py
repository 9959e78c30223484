"""What a model learned: attention maps, ablation of heads, copied text, kinds of tokens."""
