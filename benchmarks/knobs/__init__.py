"""Questions about knobs: does a run find the best value of a scalar that is no learning rate?"""
