"""The stages sft, reward, ppo and eval, and what they share."""
