"""Jobs with several roles: trainers, rollout engines, tools and rewards of reinforcement learning."""
