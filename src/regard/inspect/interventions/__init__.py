"""Change what a model computes, and measure the effect: ablation, activation patching, attribution,
the logit lens and rollout.
"""
