"""The stages sft, reward, ppo and eval, and their shared code."""
