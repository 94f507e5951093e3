"""Answers as a biologist reads them: tracks for genome browsers, motifs, logos and heat maps."""
