"""A record: one rank's part of one routed expert, MXFP4 codes and scales together, so that one DMA brings it.

int32 [rows, L], L the latent width, F the expert width of this rank:

    codes of gate and up   2F / 8 rows   word (i, l): nibble t is output 8 i + t of input l; gate's F outputs, then up's
    codes of down           F / 8 rows   word (i, l): nibble t is hidden channel 8 i + t of output l
    scales of gate and up                a chunk, two rows high, holds eight groups of 32 inputs: row i, lane o, byte t
                                         is the scale of output o in group 4 i + t; chunks fill the lanes of two rows
    scales of down                       row i, lane l, byte t is that of output l in group 4 i + t of hidden channels

so that the bytes of a chunk's words, one below the other, are eight whole rows.

Every rank holds a slice of every expert, hence no choice of experts makes one rank wait for another.
"""

from dataclasses import dataclass

from pallas_kernels.decode.config import LANES, DecodeConfig, round_up

GROUP = 32  # codes that share a scale
PER_WORD = 8  # codes in a word
SCALES = 4  # scales in a word
CHUNK = 2  # rows of words in a chunk of scales


@dataclass(frozen=True)
class Record:
    latent: int
    expert: int

    @staticmethod
    def of(config: DecodeConfig) -> "Record":
        return Record(config.moe.latent, config.share(config.moe.expert))

    @property
    def up_rows(self) -> int:
        return 2 * self.expert // PER_WORD

    @property
    def down_rows(self) -> int:
        return self.expert // PER_WORD

    @property
    def chunk_lanes(self) -> int:
        return round_up(2 * self.expert, LANES)

    @property
    def chunks_per_row(self) -> int:
        return self.latent // self.chunk_lanes

    @property
    def chunks(self) -> int:
        return self.latent // (GROUP * SCALES * CHUNK)

    @property
    def up_scale_start(self) -> int:
        return self.up_rows + self.down_rows

    @property
    def down_scale_start(self) -> int:
        return self.up_scale_start + CHUNK * -(-self.chunks // self.chunks_per_row)

    @property
    def down_scale_rows(self) -> int:
        return -(-self.expert // (GROUP * SCALES))

    @property
    def shape(self) -> tuple[int, int]:
        return round_up(self.down_scale_start + self.down_scale_rows, 8), self.latent

    def chunk_at(self, chunk: int) -> tuple[int, int]:
        """(first row, first lane) of a chunk of gate's and up's scales."""
        row, place = divmod(chunk, self.chunks_per_row)
        return self.up_scale_start + CHUNK * row, place * self.chunk_lanes
