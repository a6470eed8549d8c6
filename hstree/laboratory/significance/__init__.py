"""Do models differ, or is it the seed?"""
