"""What views draw of a trace: lanes as exact cells and runs, curves, gaps with their surroundings.

scene            a trace's lanes, steps and gaps together
cells, runs      a lane reduced to the classes' time in cells, and to runs of one class
curves           samples of a card, reduced to the mean of each cell
more_lanes       lanes of streams and host threads
tracks           rows of slices, for other viewers
gap_table        all gaps as columns
gap_detail       what ran around one gap; worst_gaps: around the largest
launches         which call issued an operation
kept             a scene as text and columns, for the cache
"""
