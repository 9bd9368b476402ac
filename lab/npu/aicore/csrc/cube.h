// Where the device is less strict than the CPU backend, and PyPTO relies on it: operations of the cube.
#pragma once

namespace pto {
// From global memory into a tile of fractals the device copies the shape that the source is given, which PyPTO makes that of
// the whole tile. The CPU backend insists on the valid shape. Rows that are loaded and not valid are in no product.
template <typename To, typename From>
    requires(To::Loc == TileType::Mat && From::layout == Layout::ND && To::SFractal == SLayout::RowMajor)
void TLOAD_IMPL(To &to, From &from) {
    const int64_t rows = from.GetShape(GlobalTensorDim::DIM_3), cols = from.GetShape(GlobalTensorDim::DIM_4);
    assert(rows <= To::Rows && cols <= To::Cols);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t col = 0; col < cols; col++)
            to.SetElement(row, col, from.data()[row * from.GetStride(GlobalTensorDim::DIM_3) + col * from.GetStride(GlobalTensorDim::DIM_4)]);
}

// For a transposed source PyPTO hands over a valid shape that is not transposed. The device does not look at it; the CPU
// backend insists on it.
template <typename To, typename From, ReluPreMode relu = ReluPreMode::NoRelu>
    requires((To::Loc == TileType::Left || To::Loc == TileType::Right) && From::Loc == TileType::Mat && relu == ReluPreMode::NoRelu)
void TEXTRACT_IMPL(To &to, From &from, uint16_t first_row, uint16_t first_col) {
    assert(first_row + to.GetValidRow() <= From::Rows && first_col + to.GetValidCol() <= From::Cols);
    for (int row = 0; row < to.GetValidRow(); row++)
        for (int col = 0; col < to.GetValidCol(); col++)
            to.SetElement(row, col, from.GetElement(first_row + row, first_col + col));
}
} // namespace pto
