"""flash_attn.layers, of which rotary alone is here."""
