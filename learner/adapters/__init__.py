"""The learner inside of other programs; nothing of the learner needs one of them."""
